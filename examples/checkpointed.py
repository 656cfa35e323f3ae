"""The smallest script that can leave a GPU and go on elsewhere: fit a line, and survive being preempted.

python examples/checkpointed.py                                # by hand
gpu-arbiter submit -- python examples/checkpointed.py          # under the arbiter
"""

import sys

import torch

from app_agent import session

STEPS = 200

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save(folder: str) -> None:
    torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}/state.pt")


def load(folder: str) -> None:
    weights, momentum = torch.load(f"{folder}/state.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(momentum)


session.init(total_steps=STEPS)
for step in range(session.restore(load), STEPS):
    x = torch.rand(64, 1, generator=torch.Generator().manual_seed(step))  # the data follow from the step's number
    loss = (model(x) - (3 * x + 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if session.step_end(step, save=save, metrics={"loss": loss}):
        sys.exit(session.EXIT_REQUEUE)

session.done()
print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
