"""The options of the commands whose code needs torch: a file each, which imports none of it, so that help is quick."""
