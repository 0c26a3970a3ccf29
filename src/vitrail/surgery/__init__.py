"""Changes to existing models: checked before anything is touched, and all of them reversible."""

from vitrail.surgery.ablation import Ablation, ablate
from vitrail.surgery.added import AddedTokens, add_tokens
from vitrail.surgery.count import Count, count
from vitrail.surgery.merge import Merging, merge
from vitrail.surgery.record import Recording, record
from vitrail.surgery.register_neurons import RegisterNeurons, find_register_neurons
from vitrail.surgery.registers import TestTimeRegisters, test_time_registers
from vitrail.surgery.trace import Trace

__all__ = [
    "Ablation",
    "AddedTokens",
    "Count",
    "Merging",
    "Recording",
    "RegisterNeurons",
    "TestTimeRegisters",
    "Trace",
    "ablate",
    "add_tokens",
    "count",
    "find_register_neurons",
    "merge",
    "record",
    "test_time_registers",
]
