"""Shape and group of shapes: the first decides the second."""
