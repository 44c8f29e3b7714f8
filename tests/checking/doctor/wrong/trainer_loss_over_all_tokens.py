"""transformers' Trainer with a compute_loss of one's own: sum over num_items_in_batch, which DDP averages again."""

import argparse

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sequences(torch.utils.data.Dataset):
    def __init__(self, num=32, length=10, vocab=29):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocab, (num, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class WeightedTrainer(Trainer):
    """Later tokens count more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        weights = torch.linspace(0.5, 1.5, each.shape[1])
        loss = (each * weights).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=29,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    training_args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.per_device_train_batch_size,
        max_steps=args.max_steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        max_grad_norm=0.0,
    )
    trainer = WeightedTrainer(model=model, args=training_args, train_dataset=Sequences())
    trainer.train()


if __name__ == "__main__":
    main()
