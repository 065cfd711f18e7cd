"""What every rank imports, once for all of them."""

from importlib import import_module

for name in (
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch_ckpt.checkpointer",
    "torch_ckpt.dcp",
):
    import_module(name)
