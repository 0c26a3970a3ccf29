"""Test cases of the kernels: one dataclass per kind of kernel, and a sample of cases for the interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check: its error and the tolerance, or why it failed."""

    topic: str
    case: str
    error: float = math.nan
    limit: float = 0.0
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within its limit, and nothing else went wrong."""
        return not self.why and self.error <= self.limit


@dataclass(frozen=True)
class Case:
    """Inputs of one kernel. Its text names it: the fields that are not at their defaults."""

    topic: ClassVar[str]

    dtype: str = "float32"
    batch: int = 2
    seed: int = 0

    def __str__(self) -> str:
        values = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join([self.topic, *values])


@dataclass(frozen=True)
class Attention(Case):
    """Attention over ``length`` tokens with heads of ``width`` channels.

    Attributes:
        layout: how q, k and v lie in memory: ``packed`` in one tensor, as a joint linear layer gives them;
            ``separate``; ``heads`` with heads before tokens; ``channels`` with tokens last.
        stepped: whether the kernel for long sequences is to run.
        sharp: factor of the queries; large ones make attention pick single keys.
        shift: added to log₂ of all sizes, which changes nothing: but where something that is not there has a score of
            0 instead of −∞, its weight overflows once all others are far below.
        padding: tokens of size 0 at the end of the first image, half as many at the end of the others.
    """

    topic: ClassVar[str] = "attention"

    length: int = 17
    width: int = 32
    heads: int = 2
    layout: str = "packed"
    stepped: bool = False
    scale: float | None = None
    sharp: float = 1.0
    shift: float = 0.0
    padding: int = 0


@dataclass(frozen=True)
class Matching(Case):
    """Matching of ``length`` tokens, the first ``protected`` of which stay.

    Attributes:
        r: merges; None for as many as there may be.
        keys: ``random``; ``lattice`` for many exact ties; ``equal`` for nothing else; ``crowd`` where every source
            wants the same destination; ``broken`` with NaN in one image and ∞ in one token of another.
        stepped: whether the kernels for long sequences are to run.
    """

    topic: ClassVar[str] = "matching"

    length: int = 17
    protected: int = 1
    r: int | None = None
    width: int = 32
    heads: int = 2
    keys: str = "random"
    layout: str = "packed"
    stepped: bool = False

    @property
    def merges(self) -> int:
        """How many tokens merge."""
        most = (self.length - self.protected) // 2
        return most if self.r is None else min(self.r, most)


@dataclass(frozen=True)
class Edges(Matching):
    """The steps of a matching one by one: best edges of features of any width, those that merge, and places.

    Attributes:
        masked: whether random tokens are protected, instead of the first ones.
        penalty: whether tokens have penalties.
        padding: tokens of size 0 at the end of the first image, half as many at the end of the others.
        counts: whether each image merges its own number, more than possible in some.
        given: whether scores are given instead of features.
    """

    topic: ClassVar[str] = "edges"

    heads: int = 1
    masked: bool = False
    penalty: bool = False
    padding: int = 0
    counts: bool = False
    given: bool = False


@dataclass(frozen=True)
class Pairs(Case):
    """All pairs of tokens: the sums of their affinities, and the most similar of some tokens."""

    topic: ClassVar[str] = "pairs"

    length: int = 17
    width: int = 32
    keys: str = "random"
    layout: str = "packed"
    heads: int = 1
    margin: float = 0.3


@dataclass(frozen=True)
class Groups(Case):
    """Places and members of random groups, by kind or by first member, and ranks.

    Attributes:
        kept: number of groups at most.
        spare: empty groups behind all others.
    """

    topic: ClassVar[str] = "groups"

    length: int = 17
    kept: int = 11
    spare: int = 0


@dataclass(frozen=True)
class Merging(Case):
    """Merging of ``length`` tokens of ``channels`` into ``kept``, of ``x`` or ``x + γ·y``, and what follows.

    Attributes:
        crowded: whether most tokens that go, go into one group.
        padding: tokens of size 0, as in ``Attention``, and as many groups without members in the first image.
        branch: dtype of y and of the LayerNorm's result, as under autocast; empty for that of the tokens.
    """

    topic: ClassVar[str] = "merging"

    length: int = 17
    kept: int = 11
    channels: int = 48
    y: bool = False
    gamma: bool = False
    add: bool = False
    norm: bool = False
    sizes: bool = False
    crowded: bool = False
    padding: int = 0
    branch: str = ""


@dataclass(frozen=True)
class Norm(Case):
    """The sum and the LayerNorm of a layer that merges nothing; ``branch`` as in ``Merging``."""

    topic: ClassVar[str] = "norm"

    length: int = 17
    channels: int = 48
    y: bool = False
    gamma: bool = False
    add: bool = False
    branch: str = ""


@dataclass(frozen=True)
class Sum(Case):
    """The sum ``x + γ·y`` alone, or ``x + y``; ``branch`` as in ``Merging``."""

    topic: ClassVar[str] = "sum"

    length: int = 17
    channels: int = 48
    gamma: bool = True
    branch: str = ""


@dataclass(frozen=True)
class AttentionBackward(Attention):
    """The gradients of attention, from its own output.

    Attributes:
        blocks: whether sequences are to be cut into blocks of 16, however short.
        split: whether the kernels for long sequences are to run.
    """

    topic: ClassVar[str] = "attention backward"

    blocks: bool = False
    split: bool = False


@dataclass(frozen=True)
class Received(Attention):
    """The attention that each token receives."""

    topic: ClassVar[str] = "attention received"


@dataclass(frozen=True)
class Rotary(Case):
    """Queries turned by a table, and their gradient.

    Attributes:
        front: tokens in front that do not turn.
        shared: axes of the table that all share: ``images``, ``heads``, both or none.
    """

    topic: ClassVar[str] = "rotary"

    length: int = 17
    width: int = 32
    heads: int = 2
    layout: str = "packed"
    front: int = 1
    shared: tuple[str, ...] = ("images", "heads")
    interleaved: bool = False


@dataclass(frozen=True)
class Backward(Case):
    """The gradients of merging, and of the sum before and the LayerNorm after it.

    Attributes:
        kept: how many tokens are left; None where nothing merges.
        tokens: whether a gradient comes along the tokens.
        strided: whether it has holes.
        padding: tokens of size 0 and groups without members, as in ``Merging``.
        branch: as in ``Merging``.
    """

    topic: ClassVar[str] = "backward"

    length: int = 17
    kept: int | None = 11
    channels: int = 48
    tokens: bool = True
    norm: bool = False
    gamma: bool = False
    sizes: bool = False
    strided: bool = False
    padding: int = 0
    branch: str = ""


HALF = "float16"

ATTENTION = (
    *(Attention(length=length, width=16) for length in (1, 2, 64, 65)),
    *(Attention(length=17, width=width) for width in (24, 32, 64, 72, 80, 128)),
    Attention(length=131, width=64, dtype=HALF, batch=1),
    Attention(length=256, width=64, dtype=HALF, batch=1, heads=1),
    Attention(length=257, width=64, dtype=HALF, batch=1, heads=1),
    Attention(length=150, width=72, batch=1),
    Attention(length=300, width=32, batch=1, heads=1, sharp=8.0),
    *(Attention(length=length, width=24, stepped=True, dtype=HALF) for length in (1, 2, 17, 65, 131)),
    *(Attention(length=33, width=80, layout=layout, dtype=HALF) for layout in ("separate", "heads", "channels")),
    Attention(length=40, width=128, stepped=True, layout="separate"),
    Attention(length=50, width=32, heads=3, scale=0.3, sharp=8.0),
    *(Attention(length=33, width=32, shift=-200.0, stepped=stepped) for stepped in (False, True)),
    *(Attention(length=80, width=32, padding=40, stepped=stepped) for stepped in (False, True)),
    Attention(length=70, width=64, padding=69, dtype=HALF),
)

ATTENTION_BACKWARD = (
    *(AttentionBackward(length=length, width=16) for length in (1, 2, 16, 33)),
    *(AttentionBackward(length=17, width=width) for width in (24, 64, 80, 128)),
    *(AttentionBackward(length=length, width=32, blocks=True, dtype=HALF) for length in (15, 16, 17, 50)),
    *(AttentionBackward(length=length, width=64, dtype=HALF, batch=1) for length in (128, 129)),
    *(AttentionBackward(length=length, width=72, dtype=HALF, batch=1) for length in (32, 65)),
    *(AttentionBackward(length=20, layout=layout, heads=3) for layout in ("separate", "heads", "channels")),
    AttentionBackward(length=40, width=32, scale=0.3, sharp=4.0),
    *(AttentionBackward(length=length, width=16, split=True) for length in (1, 2, 33)),
    *(AttentionBackward(length=17, width=width, split=True) for width in (24, 64, 80, 128)),
    *(AttentionBackward(length=length, blocks=True, split=True, dtype=HALF) for length in (15, 16, 17, 50)),
    AttentionBackward(length=40, width=64, split=True, dtype=HALF, batch=1),
    *(AttentionBackward(length=20, layout=layout, heads=3, split=True) for layout in ("separate", "heads", "channels")),
    AttentionBackward(length=40, width=32, scale=0.3, sharp=4.0, split=True),
    *(AttentionBackward(length=33, width=32, shift=-200.0, split=split) for split in (False, True)),
    *(
        AttentionBackward(length=50, padding=40, blocks=blocks, split=split)
        for blocks in (False, True)
        for split in (False, True)
    ),
    *(AttentionBackward(length=24, shift=-200.0, blocks=True, split=split, dtype=HALF) for split in (False, True)),
)

RECEIVED = (
    *(Received(length=length, width=16) for length in (1, 2, 64, 65)),
    *(Received(length=17, width=width, dtype=HALF) for width in (24, 64, 72, 128)),
    Received(length=131, width=64, dtype=HALF, batch=1),
    *(Received(length=33, width=80, layout=layout) for layout in ("separate", "heads", "channels")),
    Received(length=50, width=32, heads=3, scale=0.3, sharp=8.0),
    Received(length=33, width=32, shift=-200.0),
    Received(length=80, width=32, padding=40),
    Received(length=140, width=16, padding=139, dtype=HALF),
)

_LENGTHS = ((2, 0), (3, 1), (7, 2), (17, 1), (18, 5), (32, 0), (33, 9), (34, 4), (65, 3), (131, 8))

MATCHING = (
    *(
        Matching(length=length, protected=protected, stepped=stepped, batch=1 + length % 3)
        for length, protected in _LENGTHS
        for stepped in (False, True)
    ),
    *(Matching(length=50, protected=protected, r=3, keys="lattice", heads=3) for protected in range(10)),
    *(Matching(length=21, r=r) for r in range(1, 10)),
    *(Matching(length=21, r=r, stepped=True) for r in (1, 2, 9)),
    *(
        Matching(length=length, protected=protected, r=r, keys=keys, stepped=stepped)
        for stepped in (False, True)
        for keys in ("lattice", "equal", "crowd", "broken")
        for length, protected, r in ((29, 1, 6), (140, 5, None))
    ),
    Matching(length=300, protected=5, r=50, batch=1),
    Matching(length=257, protected=1, keys="lattice", batch=1),
    *(Matching(length=37, width=width, dtype=HALF, heads=3) for width in (16, 24, 64, 72, 80, 128)),
    *(Matching(length=length, width=136, dtype=HALF) for length in (37, 70)),
    Matching(length=33, width=200, heads=3, layout="separate"),
    *(Matching(length=37, layout=layout, dtype=HALF) for layout in ("separate", "heads", "channels")),
)

EDGES = (
    *(
        Edges(length=length, protected=protected, width=width, penalty=width > 128)
        for length, protected in ((2, 0), (3, 1), (17, 2), (65, 1), (131, 5))
        for width in (16, 200)
    ),
    *(Edges(length=70, width=136, dtype=HALF, masked=masked, counts=True) for masked in (False, True)),
    *(Edges(length=66, width=384, padding=30, counts=True, penalty=penalty) for penalty in (False, True)),
    *(Edges(length=33, masked=masked, counts=True, padding=9, given=True) for masked in (False, True)),
    Edges(length=140, r=9, given=True, keys="lattice"),
    *(Edges(length=29, width=160, keys=keys) for keys in ("equal", "crowd", "broken", "lattice")),
    *(Edges(length=37, width=136, layout=layout, dtype=HALF) for layout in ("separate", "channels")),
    Edges(length=40, width=144, heads=3, dtype=HALF),
)

PAIRS = (
    *(Pairs(length=length, width=width) for length in (1, 2, 17, 65, 130) for width in (16, 200)),
    *(Pairs(length=37, width=width, dtype=HALF, margin=-0.2) for width in (64, 136)),
    *(Pairs(length=40, width=24, keys=keys) for keys in ("lattice", "equal", "broken")),
    Pairs(length=33, layout="channels"),
)

GROUPS = (
    *(Groups(length=length, kept=kept) for length, kept in ((1, 1), (2, 1), (17, 11), (64, 64), (65, 20), (130, 1))),
    *(Groups(length=length, kept=length // 2, spare=5) for length in (16, 63, 64, 65)),
)

_EVERYTHING = {"y": True, "gamma": True, "add": True, "norm": True, "sizes": True}

MERGING = (
    Merging(),
    *(Merging(**{name: True, "y": True}) for name in _EVERYTHING),
    *(Merging(**{**_EVERYTHING, name: False}) for name in ("gamma", "add", "norm", "sizes")),
    *(Merging(**_EVERYTHING, dtype=dtype, crowded=True, length=40, kept=20) for dtype in ("float32", HALF)),
    *(Merging(**_EVERYTHING, channels=channels, dtype=HALF) for channels in (1, 32, 384, 768)),
    Merging(norm=True, sizes=True),
    Merging(sizes=True, padding=4),
    Merging(padding=4, norm=True),
    *(Merging(**_EVERYTHING, padding=5, dtype=dtype) for dtype in ("float32", HALF)),
    Merging(length=2, kept=1, sizes=True),
    Merging(length=9, kept=9, sizes=True, dtype=HALF),
    *(Merging(y=True, norm=True, sizes=True, gamma=gamma, branch=HALF) for gamma in (False, True)),
)

NORM = (
    *(Norm(dtype=dtype, channels=channels) for dtype in ("float32", HALF) for channels in (48, 192)),
    *(Norm(y=True, gamma=gamma, add=add, dtype=HALF) for gamma in (False, True) for add in (False, True)),
    Norm(y=True, gamma=True, add=True, channels=1024, length=3),
    Norm(branch=HALF),
    *(Norm(y=True, gamma=gamma, branch=HALF) for gamma in (False, True)),
)

BACKWARD = (
    *(Backward(dtype=dtype, sizes=sizes) for dtype in ("float32", HALF) for sizes in (False, True)),
    Backward(strided=True, sizes=True, channels=64),
    Backward(length=40, kept=20, channels=384, sizes=True),
    *(
        Backward(norm=True, gamma=gamma, sizes=True, dtype=dtype)
        for dtype in ("float32", HALF)
        for gamma in (False, True)
    ),
    *(
        Backward(kept=None, norm=True, gamma=gamma, tokens=tokens)
        for gamma in (False, True)
        for tokens in (False, True)
    ),
    Backward(norm=True, tokens=False, channels=200),
    *(Backward(norm=norm, gamma=norm, sizes=True, padding=4) for norm in (False, True)),
    *(Backward(kept=kept, norm=True, gamma=gamma, branch=HALF) for kept in (None, 11) for gamma in (False, True)),
)

SUM = (
    *(Sum(dtype=dtype, channels=channels) for dtype in ("float32", HALF) for channels in (48, 768)),
    *(Sum(gamma=gamma, branch=HALF) for gamma in (False, True)),
)

ROTARY = (
    *(Rotary(width=width, interleaved=turn, dtype=HALF) for width in (16, 64, 72, 80) for turn in (False, True)),
    *(Rotary(heads=3, shared=shared, interleaved=True) for shared in ((), ("images",), ("heads",))),
    *(Rotary(layout=layout, heads=3, width=24) for layout in ("separate", "heads", "channels")),
    *(Rotary(front=front, length=9) for front in (0, 5, 9)),
)

SAMPLE: tuple[Case, ...] = (
    *ATTENTION, *ATTENTION_BACKWARD, *RECEIVED, *MATCHING, *EDGES, *PAIRS, *GROUPS, *MERGING, *NORM, *SUM, *BACKWARD,
    *ROTARY,
)  # fmt: skip
"""What the interpreter runs in a few seconds."""
