"""What the scheduler and the runners know about the images of a step."""
