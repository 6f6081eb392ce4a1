"""Trace replay in parts: traces, schemas, pools, the cache under replay, the bound, the plot."""
