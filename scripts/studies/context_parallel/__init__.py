"""Ways to divide the attention of one prefill over ranks: the same numbers, with different bytes and work."""
