"""Granite 3 and 4 with experts: Mixtral's layer with Granite's factors, and a shared expert without a gate.

IBM, 2024 and 2025 (github.com/ibm-granite). All experts of a layer are in one tensor. Of Granite 4, those
models run whose layers all have attention.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.mixtral import forward
from localchat_cuda.architectures.names import ExpertNames

NAMES = replace(
    llama.NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        gate_up=("block_sparse_moe.experts.{}.gate_proj", "block_sparse_moe.experts.{}.up_proj"),
        down="block_sparse_moe.experts.{}.down_proj",
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        shared=(("shared_mlp.input_linear",), "shared_mlp.output_linear"),
    ),
)
"""Checkpoint name of each weight."""

__all__ = ["NAMES", "forward"]
