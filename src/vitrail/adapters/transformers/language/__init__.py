"""Vision towers of models with a language model behind them."""
