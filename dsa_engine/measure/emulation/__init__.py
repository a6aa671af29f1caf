"""One rank of many on one device: its own work is real, the other ranks are made up by subclasses of the real ones."""
