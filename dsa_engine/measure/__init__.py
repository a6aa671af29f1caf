"""Everything that times, counts, emulates, reports or plots; nothing but scripts and the CLI imports it."""
