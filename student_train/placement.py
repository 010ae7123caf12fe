"""Where the norm sits: one table of sublayer equations.

x is the residual stream [tokens, d_model], F a sublayer (attention or feed-forward), N an
RMSNorm with gain. A placement also says where the one extra norm of the stack goes: `final`, on
top of the last active block, or `entry`, between the embedding and block 0. Both have two norms a
layer and one extra, so all placements here have equal parameter counts.

Source: S. Ren et al., arXiv 2608.13156, section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Placement:
    """`sublayer(x, F, N)` gives the stream after one sublayer."""

    sublayer: Callable[[Tensor, Map, Map], Tensor]
    extra_norm: Literal["entry", "final"]


PLACEMENTS = {
    "pre": Placement(lambda x, f, norm: x + f(norm(x)), extra_norm="final"),
    "post": Placement(lambda x, f, norm: norm(x + f(x)), extra_norm="entry"),
}
