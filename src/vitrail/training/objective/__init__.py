"""What a model learns: losses by role, teachers, self-distillation."""
