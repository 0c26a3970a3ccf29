"""Shape and group of shapes: the first label determines the second."""
