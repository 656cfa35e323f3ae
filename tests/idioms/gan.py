"""A GAN: two networks with an optimizer each, both stepped in every mini-batch."""

import sys
import time

import torch
from torch import nn

MINI_BATCHES = 60


def train():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 16))
    critic = nn.Sequential(nn.Linear(16, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    judge = nn.BCEWithLogitsLoss()
    yes, no = torch.ones(16, 1), torch.zeros(16, 1)
    for _ in range(MINI_BATCHES):
        real, fake = torch.randn(16, 16) + 3, generator(torch.randn(16, 8))
        of_critic.zero_grad()
        (judge(critic(real), yes) + judge(critic(fake.detach()), no)).backward()
        of_critic.step()
        of_generator.zero_grad()
        judge(critic(fake), yes).backward()
        of_generator.step()
        time.sleep(0.06)
    torch.save([generator.state_dict(), critic.state_dict()], sys.argv[1])


if __name__ == "__main__":
    train()
