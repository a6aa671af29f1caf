import torch
class HostPages:
    def __init__(self, cache, slots):
        self.pools = [(p, torch.empty(slots, p.shape[1]*p.shape[2]*p.element_size(), dtype=torch.uint8)) for l in range(len(cache.latent)) for p in (cache.latent[l], cache.index_keys[l]) if p is not None]
        self.slots = slots
    @property
    def page_bytes(self): return sum(h.shape[1] for _, h in self.pools)
    @property
    def bytes(self): return self.page_bytes*self.slots
    def parts(self, slot):
        return [memoryview(h[slot].numpy()) for _, h in self.pools]
