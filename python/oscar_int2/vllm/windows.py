"""Which exact window a running request holds in vLLM's first model runner. The second one has an index for
each running request, which is its window."""


class WindowSlots:
    """Request slots 0 to count - 1, by request id. A request keeps its slot until it ends or is preempted;
    vLLM runs at most max_num_seqs requests, so that many slots are enough."""

    def __init__(self, count):
        self.free = list(range(count))[::-1]
        self.of = {}

    def release(self, request_ids):
        """Takes back the slots of those that hold one. Returns them."""
        slots = [self.of.pop(r) for r in request_ids if r in self.of]
        self.free += slots
        return slots

    def hold(self, request_ids):
        """The slots of these requests, in order; newcomers get a free one."""
        for request in request_ids:
            if request not in self.of:
                self.of[request] = self.free.pop()
        return [self.of[r] for r in request_ids]
