"""Values of Keras variables that stand for a TensorFlow tensor, and can be used wherever a tensor is expected."""

from __future__ import annotations

from typing import Any

from distlaunch.patches.tensorflow_late import tf, when_imported

_UNARY = ("abs", "neg", "invert")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISONS = ("lt", "le", "gt", "ge")
_NUMBERS = ("float", "int", "complex")


class StandIn:
    """Base class of values that stand for a tensor; a subclass returns the tensor."""

    def as_tensor(self) -> tf.Tensor:
        raise NotImplementedError

    def __getitem__(self, item: Any) -> Any:
        return self.as_tensor()[item]


def _forward(name: str) -> Any:
    def method(self: StandIn, *operands: Any) -> Any:
        return getattr(self.as_tensor(), name)(*operands)

    return method


for _name in (*_UNARY, *_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_NUMBERS):
    # Python looks up operators on the class, without `__getattr__`
    setattr(StandIn, f"__{_name}__", _forward(f"__{_name}__"))


def _convert(value: StandIn, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    tensor = value.as_tensor()
    return tensor if dtype is None or dtype == tensor.dtype else tf.cast(tensor, dtype)


when_imported(lambda: tf.register_tensor_conversion_function(StandIn, _convert))
