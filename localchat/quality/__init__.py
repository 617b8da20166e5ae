"""Quality of models beside each other: perplexity, divergence, needles, JSON, tool calls and questions."""
