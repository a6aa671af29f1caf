"""One rank of many on one device: made-up groups, planned routing, modelled links."""
