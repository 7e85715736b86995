"""Messages of a request: rules, images and reserved names, up to token ids."""
