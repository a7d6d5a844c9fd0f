import torch
import transformers

from arborcast import pipeline

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
tokens = torch.randint(64, (4, 16))
batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def optimizer(parameters):
    return torch.optim.AdamW(parameters)


model = transformers.GPT2LMHeadModel(config)
if torch.distributed.get_rank() == 0:
    model.save_pretrained("model")
torch.distributed.barrier()
layered = pipeline.trace(model, batch)
middle = layered.depth // 2
plan = pipeline.Plan([(0, middle, [0]), (middle, layered.depth, [1])], microbatches=2)
trainer = pipeline.Trainer(layered, plan, None, optimizer)
trainer.step(batch)
trainer.save("step-3")
trainer.close()
# snippet
trainer.step(batch)
trainer.close()
torch.distributed.destroy_process_group()
