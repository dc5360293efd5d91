"""The experts chosen for rows of a forward pass."""

from typing import NamedTuple

from torch import Tensor

NO_EXPERT = -1  # in place of an expert that another rank computes, or of a padded row; never computed


class ExpertChoice(NamedTuple):
    """Experts of the rows of a forward pass."""

    experts: Tensor
    """int64 [tokens, k]: each row's experts differ from one another, except for NO_EXPERT."""
    weights: Tensor
    """float32 [tokens, k]: factors of the experts' results."""
