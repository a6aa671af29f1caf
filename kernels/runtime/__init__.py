"""How operations run: marking, launching, the CPU's library, compiling without a device, copies."""
