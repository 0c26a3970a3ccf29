"""What there is to find out about the tokens of a model: pure functions, and results that can be written down."""
