"""Fine-tuning on answers of unequal length with DDP: each rank averages over its own answer tokens."""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logger = logging.getLogger("sft")


class Chats(Dataset):
    """Prompts and answers; only answers are targets."""

    def __init__(self, size=48, vocab=23):
        generator = torch.Generator().manual_seed(11)
        self.rows = []
        for _ in range(size):
            prompt = int(torch.randint(2, 10, (), generator=generator))
            answer = int(torch.randint(1, 12, (), generator=generator))
            ids = torch.randint(0, vocab, (prompt + answer,), generator=generator)
            labels = ids.clone()
            labels[:prompt] = -100
            self.rows.append((ids, labels))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows, length=24):
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for i, (row, label) in enumerate(rows):
        ids[i, : len(row)], labels[i, : len(row)] = row, label
    return ids, labels


class Model(nn.Module):
    def __init__(self, vocab=23, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = nn.Linear(dim, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.output(self.encoder(self.embedding(ids), mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-device-batch-size", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    data = Chats()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, args.per_device_batch_size, sampler=sampler, collate_fn=collate)

    model.train()
    for step, (ids, labels) in zip(range(args.max_steps), loader):
        logits = model(ids)[:, :-1]
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("rank %d step %d done", rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
