"""What a model learns: targets, losses, teachers."""
