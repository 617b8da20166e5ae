"""Granite 3 with experts: Mixtral's layer with Granite's factors, and a shared expert without a gate.

IBM, 2024 (github.com/ibm-granite). All experts of a layer are in one tensor.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames

FAMILY = Family(
    name="granite_moe",
    classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    names=replace(
        llama.FAMILY.names,
        experts=ExpertNames(
            router="block_sparse_moe.router.layer",
            gate_up=(
                "block_sparse_moe.experts.{}.gate_proj",
                "block_sparse_moe.experts.{}.up_proj",
            ),
            down="block_sparse_moe.experts.{}.down_proj",
            stacked=(
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.output_linear.weight",
            ),
            shared=(("shared_mlp.input_linear",), "shared_mlp.output_linear"),
        ),
    ),
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    multipliers=True,
    experts=ExpertTraits(normalized=True),
)
forward = llama.forward
