"""Two stages by send and recv, one embedding on the first and the last, whose gradients are added up."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

V, C, M, B, T = 19, 10, 4, 8, 6


class First(nn.Module):
    def __init__(s, wte, layer):
        super().__init__()
        s.wte, s.layer0 = wte, layer

    def forward(s, ids):
        return s.layer0(s.wte(ids))


class Last(nn.Module):
    def __init__(s, wte, layer, norm):
        super().__init__()
        s.wte, s.layer1, s.norm = wte, layer, norm

    def forward(s, h):
        return s.norm(s.layer1(h)) @ s.wte.weight.T


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    wte = nn.Embedding(V, C)
    l0, l1, norm = nn.Sequential(nn.Linear(C, C), nn.ReLU()), nn.Sequential(nn.Linear(C, C), nn.ReLU()), nn.LayerNorm(C)
    if world == 1:
        stages = [First(wte, l0), Last(wte, l1, norm)]
        params = list(nn.ModuleList(stages).parameters())
    else:
        stage = First(wte, l0) if rank == 0 else Last(wte, l1, norm)
        params = list(stage.parameters())
    opt = torch.optim.Adam(params, lr=1e-3)
    gen = torch.Generator().manual_seed(1)
    for step in range(3):
        text = torch.randint(0, V, (B, T + 1), generator=gen)
        micros = text.chunk(M)
        opt.zero_grad()
        if world == 1:
            for m in micros:
                loss = F.cross_entropy(stages[1](stages[0](m[:, :-1])).flatten(0, 1), m[:, 1:].flatten()) / M
                loss.backward()
        elif rank == 0:
            outs = []
            for m in micros:
                h = stage(m[:, :-1])
                dist.send(h.detach(), 1)
                outs.append(h)
            for h in outs:
                g = torch.empty_like(h)
                dist.recv(g, 1)
                h.backward(g)
        else:
            inputs = []
            for _ in micros:
                h = torch.empty(B // M, T, C)
                dist.recv(h, 0)
                inputs.append(h)
            for m, h in zip(micros, inputs):
                h.requires_grad_()
                loss = F.cross_entropy(stage(h).flatten(0, 1), m[:, 1:].flatten()) / M
                loss.backward()
                dist.send(h.grad, 0)
        if world > 1:
            dist.all_reduce(wte.weight.grad)
        opt.step()
        if rank == world - 1:
            print(f"step {step} loss {loss.item() * M:.6f}")


main()
