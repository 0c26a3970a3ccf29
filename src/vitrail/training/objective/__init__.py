"""The objective: targets, losses, teachers."""
