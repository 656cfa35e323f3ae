#!/usr/bin/env python
# coding: utf-8  # noqa: UP009 - as notebooks are exported
"""A notebook exported as a script: cells one after the other, no functions, no `__main__`."""

# # Regression

# In[1]:

import sys
import time

import torch

# In[2]:

torch.manual_seed(0)
torch.set_num_threads(1)
MINI_BATCHES = 80
x_all = torch.randn(640, 32)
y_all = x_all.sum(1, keepdim=True)

# In[3]:

model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []

# In[4]:

for i in range(MINI_BATCHES):  # noqa: B007 - as it is written everywhere
    pick = torch.randint(0, 640, (16,))
    loss = ((model(x_all[pick]) - y_all[pick]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    time.sleep(0.05)

# In[5]:

print(losses[-1])
torch.save([model.state_dict(), losses], sys.argv[1])
