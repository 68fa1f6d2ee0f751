"""Write the demo model as a Hugging Face folder in float32, for engines that cannot read GGUF.

python -m scripts.golden.export_demo_model FOLDER
"""

import json
from pathlib import Path

import click
from safetensors.numpy import save_file

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.text.tokenizer import load_tokenizer


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Write FOLDER, which must not exist, with all tensors dequantised."""
    folder.mkdir(parents=True)
    checkpoint = open_checkpoint("smollm2-135m-instruct")
    c = checkpoint.config
    assert c.rope
    # The second frequency is theta^(-2 / H).
    theta = round(c.rope.frequencies[1] ** (-c.head_dim / 2), 3)
    config = {
        "architectures": [c.architecture],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.load() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(checkpoint).save(folder)


if __name__ == "__main__":
    main()
