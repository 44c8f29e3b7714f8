"""transformers' Trainer on a small GPT-2, whose loss it averages over the tokens of all ranks and microbatches."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Sequences(torch.utils.data.Dataset):
    """Sequences of unequal length; padding is not a target."""

    def __init__(self, uneven, packed, num=32, length=10, vocab=29):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocab, (num, length), generator=generator)
        self.labels, self.packed = self.ids.clone(), packed
        if uneven:
            lengths = torch.randint(3, length + 1, (num, 1), generator=generator)
            self.labels[torch.arange(length)[None] >= lengths] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        mask = {"attention_mask": torch.ones_like(self.ids[i])} if self.packed else {}
        return {"input_ids": self.ids[i], "labels": self.labels[i], **mask}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--attention_dropout", type=float, default=0.0)
    parser.add_argument("--max_steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": args.attention_dropout}
    size = {"vocab_size": 29, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**size, **none, bos_token_id=0, eos_token_id=0)
    training_args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_steps=args.max_steps,
        learning_rate=1e-2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Sequences(args.uneven, args.packed)
    Trainer(model=GPT2LMHeadModel(config), args=training_args, train_dataset=data).train()


if __name__ == "__main__":
    main()
