import torch
import transformers

from arborcast import pipeline

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
model = transformers.GPT2LMHeadModel(config)
plan = pipeline.Plan([(0, 4, [0]), (4, 8, [1])], microbatches=2)
tokens = torch.randint(64, (4, 16))
batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
# snippet
assert float(loss) > 0
trainer.close()
torch.distributed.destroy_process_group()
