"""P/D disaggregation: two parts of a run, each with its own engine, that speak in messages."""
