"""Data parallel for the stand-in: each process has the whole model, and MindSpore's AllReduce adds the gradients up.

As hyper_parallel's on a mesh of n replicas of one part, fully_shard gives a module new parameters with placements, a
mesh and to_local(), and makes it an HSDPModule; gradients are summed in float32 into main_grad, over the processes
where a backward does not leave that to the next one. Operators take these parameters at any time, where those of
hyper_parallel are plain in the forward of their module alone.
"""

import functools
import math

_model = None


class Replicate:
    """Each device along an axis of the mesh has the whole tensor."""

    def is_shard(self, dim=None):
        return False


class Shard:
    """Each device along an axis of the mesh has a part of the tensor's axis ``dim``."""

    def __init__(self, dim):
        self.dim = dim

    def is_shard(self, dim=None):
        return dim in (None, self.dim)


class _HasPlacements(type):
    def __instancecheck__(cls, instance):
        return hasattr(instance, "placements")


class DTensor(metaclass=_HasPlacements):
    """The type of distributed tensors: every tensor with placements is one."""


class DeviceMesh:
    """Axes of devices, name -> size; all processes are along one of them."""

    def __init__(self, sizes):
        self.sizes = sizes

    ndim = property(lambda self: len(self.sizes))
    mesh_dim_names = property(lambda self: tuple(self.sizes))

    def __getitem__(self, names):
        names = (names,) if isinstance(names, str) else names
        return DeviceMesh({name: self.sizes[name] for name in names})

    def size(self, dim=None):
        sizes = tuple(self.sizes.values())
        return math.prod(sizes) if dim is None else sizes[dim]

    def get_group(self):
        from mindspore.communication import GlobalComm, get_group_size

        if self.size() != get_group_size():
            raise NotImplementedError(f"hyper_parallel's stand-in has no group for the mesh {self.sizes}.")
        return GlobalComm.WORLD_COMM_GROUP

    def _unflatten(self, dim, sizes, names, backend_override=None):
        return DeviceMesh(dict(zip(names, sizes)))

    def _flatten(self, name):
        return DeviceMesh({name: self.size()})


def init_device_mesh(device_type, mesh_shape, mesh_dim_names):
    """Returns the mesh of all processes."""
    return DeviceMesh(dict(zip(mesh_dim_names, mesh_shape)))


def mark(tensor, mesh):
    """Makes a tensor, in place, one of which each process has the whole; returns it."""
    tensor.device_mesh, tensor.placements, tensor.layout = mesh, (Replicate(), Shard(0)), mesh
    tensor.to_local = lambda: tensor
    return tensor


def distribute_tensor(tensor, device_mesh, placements):
    """Returns this process's part of a whole tensor: all of it."""
    return tensor


def get_current_layout(network):
    """Returns rank -> name of a parameter -> what is known of it, of this process: that it is whole."""
    from mindspore.communication import get_rank

    parameters = network.get_parameters()
    return {get_rank(): {each.name: {"type": each.dtype, "full_shape": each.shape} for each in parameters}}


class HSDPModule:
    """What fully_shard makes of a cell."""

    reduces, averages = True, True

    def set_reduce_op_type(self, reduce_op_type):
        self.averages = reduce_op_type == "avg"

    def set_requires_all_reduce(self, requires_all_reduce):
        self.reduces = requires_all_reduce

    def set_modules_to_forward_prefetch(self, modules):
        """Does nothing: no weight has to be gathered."""

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def zero_grad(self):
        for parameter in self.get_parameters():
            parameter.grad = parameter.main_grad = parameter.own_grad = None


@functools.lru_cache(maxsize=None)
def _managed(kind):
    return type(kind.__name__, (HSDPModule, kind), {"__module__": kind.__module__})


def _managed_parameter(parameter, mesh):
    """Returns what takes the place of a parameter, whose values are made later."""
    from mindspore import Parameter, mint

    values = mint.empty(parameter.shape, dtype=parameter.dtype)
    managed = Parameter(values, name=parameter.name, requires_grad=parameter.requires_grad)
    managed.main_grad = managed.own_grad = None
    return mark(managed, mesh)


def fully_shard(module, *, mesh, **_):
    """Gives a module parameters that it manages; the last one of a run is its whole model."""
    global _model
    if mesh.ndim != 2 or mesh.size(1) > 1:
        raise NotImplementedError(
            f"hyper_parallel's stand-in divides no weight, and the mesh is {mesh.sizes}. "
            "Set parallelism.data_parallel_shard: 1."
        )
    replaced = {}
    for _, cell in module.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = _managed_parameter(parameter, mesh)
                cell._params[name] = replaced[id(parameter)]
    module.__class__ = _managed(type(module))
    _model = module
    return module


def reduce_gradients():
    """Ends a backward: sums its gradients over all processes into main_grad, or keeps them for the next backward."""
    if _model is None:
        return
    from mindspore import dtype
    from mindspore.mint.distributed import all_reduce

    for parameter in _model.get_parameters():
        if parameter.grad is None:
            continue
        own = _sum(parameter.own_grad, parameter.grad.astype(dtype.float32))
        parameter.grad, parameter.own_grad = None, own
        if _model.reduces:
            all_reduce(own)
            gradient = own / parameter.device_mesh.size(0) if _model.averages else own
            parameter.main_grad = mark(_sum(parameter.main_grad, gradient), parameter.device_mesh)
            parameter.own_grad = None


def _sum(before, gradient):
    return gradient if before is None else before + gradient
