"""The second seam: attention outside transformers' interface, seen in torch's own functions."""

from headwise.models.torch_seam.heads import Heads as Heads
from headwise.models.torch_seam.locating import locate as locate
from headwise.models.torch_seam.seam import TorchSeam as TorchSeam
from headwise.models.torch_seam.seam import by_torch as by_torch
from headwise.models.torch_seam.seam import outside as outside
