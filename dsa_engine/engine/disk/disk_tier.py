"""The disk behind the caches: prompts that have been prefilled once are read by later runs and by other processes."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.disk.disk_loads import DiskLoads
from dsa_engine.engine.disk.disk_stores import DiskStores


@dataclass
class DiskTier:
    """Both directions, on one rank."""

    loads: DiskLoads
    stores: DiskStores

    def close(self) -> None:
        """Writes what has been handed over, and ends the threads."""
        self.loads.close()
        self.stores.close()
