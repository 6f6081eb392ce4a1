"""Which tokens run in the next step: requests, admission, order, batches."""
