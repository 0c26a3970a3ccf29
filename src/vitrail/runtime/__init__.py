"""How a changed model runs: plan, state, block forward."""
