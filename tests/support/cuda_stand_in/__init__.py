"""A pretended GPU, for tests on machines without one: cuda:0 of torch's CPU build.

Its tensors lie in ordinary memory and are computed by the CPU's kernels, but they say that they are on cuda:0,
refuse to be mixed with tensors of the CPU, run autograd, and count what would cost a GPU's time: waits of the host,
copies, and operators, each with the line of our code that caused it (`device.Counts`). So it finds wrong assumptions
about devices and lines that wait; it says nothing of kernels, streams, NCCL, Triton or memory. Fused attention is
composed of plain operators, and random numbers are the CPU's.

A process that pretends does so to its end. So one process serves a whole session of tests (`server`), and forks for
each case: a function of the test's file that takes and returns what JSON holds. `client.StandIn.run` runs it there:

    def sums():
        import torch
        with counted() as counts:
            total = torch.ones(3, device="cuda").sum().item()
        return {"total": total, "waits": counts.total("waits")}

    def test_an_item_waits(on_cuda):
        assert on_cuda(sums) == {"total": 3.0, "waits": 1}
"""
