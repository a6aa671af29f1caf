"""Where the rows of pages lie."""
