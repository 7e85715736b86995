"""What edit sites are made of; knows neither the engine nor any single site."""
