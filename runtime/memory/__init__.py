"""Block pools and the tensors behind them."""
