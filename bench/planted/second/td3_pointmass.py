"""Train a continuous-control agent (TD3 style, twin critics, replay buffer) on many simulated point masses."""
import argparse
import copy
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class PointMass:
    """Many point masses at once; each has to reach its goal."""

    obs_dim, action_dim = 18, 2

    def __init__(self, count, rng):
        self.rng = rng
        self.state = rng.uniform(-1, 1, size=(count, 6))
        self.age = rng.integers(0, 50, size=count)

    def observe(self):
        return np.concatenate([self.state, np.sin(3 * self.state), np.cos(3 * self.state)], axis=1)

    def step(self, action):
        position, velocity, goal = np.split(self.state, 3, axis=1)
        velocity += 0.1 * action - 0.05 * velocity
        position += 0.1 * velocity
        reward = -np.linalg.norm(position - goal, axis=1) - 0.01 * np.square(action).sum(1)
        following = self.observe()
        self.age = (self.age + 1) % 50
        done = self.age == 0
        self.state[done] = self.rng.uniform(-1, 1, size=(done.sum(), 6))
        return following, reward


class ReplayBuffer:
    def __init__(self, capacity, obs_dim, action_dim, dtype, rng):
        self.capacity, self.rng, self.size, self.cursor = capacity, rng, 0, 0
        self.obs, self.next_obs = np.zeros((2, capacity, obs_dim), dtype)
        self.action = np.zeros((capacity, action_dim), dtype)
        self.reward = np.zeros((capacity, 1), dtype)

    def add(self, obs, action, reward, next_obs):
        rows = (self.cursor + np.arange(len(obs))) % self.capacity
        self.obs[rows], self.action[rows] = obs, action
        self.reward[rows, 0], self.next_obs[rows] = reward, next_obs
        self.cursor = (self.cursor + len(obs)) % self.capacity
        self.size = min(self.capacity, self.size + len(obs))

    def sample(self, batch_size):
        rows = self.rng.integers(self.size, size=batch_size)
        return tuple(torch.from_numpy(a[rows]) for a in (self.obs, self.action, self.reward, self.next_obs))


def mlp(d_in, hidden, d_out):
    first, second, last = nn.Linear(d_in, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, d_out)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


class Agent:
    def __init__(self, obs_dim, action_dim, hidden, dtype, gamma=0.97, tau=0.005, lr=1e-3):
        self.gamma, self.tau, self.dtype = gamma, tau, dtype
        self.actor = nn.Sequential(mlp(obs_dim, hidden, action_dim), nn.Tanh()).to(dtype)
        self.critics = nn.ModuleList(mlp(obs_dim + action_dim, hidden, 1) for _ in range(2)).to(dtype)
        self.actor_target = copy.deepcopy(self.actor).requires_grad_(False)
        self.critics_target = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=lr, fused=True)
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=lr, fused=True)

    @torch.no_grad()
    def act(self, obs, noise):
        action = self.actor(torch.as_tensor(obs, dtype=self.dtype)).numpy()
        return np.clip(action + noise, -1, 1)

    def update(self, obs, action, reward, next_obs):
        with torch.no_grad():
            next_action = self.actor_target(next_obs)
            next_action = (next_action + (0.2 * torch.randn_like(next_action)).clamp_(-0.5, 0.5)).clamp_(-1, 1)
            pair = torch.cat([next_obs, next_action], 1)
            target = reward + self.gamma * torch.minimum(*(critic(pair) for critic in self.critics_target))
        pair = torch.cat([obs, action], 1)
        critic_loss = sum(F.mse_loss(critic(pair), target) for critic in self.critics)
        self.critic_opt.zero_grad(set_to_none=True)
        critic_loss.backward()
        self.critic_opt.step()
        self.critics.requires_grad_(False)
        actor_loss = -self.critics[0](torch.cat([obs, self.actor(obs)], 1)).mean()
        self.actor_opt.zero_grad(set_to_none=True)
        actor_loss.backward()
        self.actor_opt.step()
        self.critics.requires_grad_(True)
        for target, source in ((self.actor_target, self.actor), (self.critics_target, self.critics)):
            torch._foreach_lerp_(list(target.parameters()), [p.detach() for p in source.parameters()], self.tau)
        return critic_loss


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=400)
    parser.add_argument("--seed", type=int, default=21)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    env = PointMass(32, rng)
    buffer = ReplayBuffer(50_000, env.obs_dim, env.action_dim, np.float32 if args.fixed else float, rng)
    agent = Agent(env.obs_dim, env.action_dim, args.hidden, torch.from_numpy(buffer.obs).dtype)
    obs = env.observe()
    start = time.perf_counter()
    for step in range(-50, args.steps):
        if step == 10:
            start = time.perf_counter()
        action = agent.act(obs, rng.normal(0, 0.1 if step >= 0 else 1.0, size=(len(obs), env.action_dim)))
        next_obs, reward = env.step(action)
        buffer.add(obs, action, reward, next_obs)
        obs = env.observe()
        if step < 0:
            continue  # fill the buffer first
        loss = agent.update(*buffer.sample(args.batch_size))
        if step % 20 == 0:
            print(f"step {step}  reward {reward.mean():.3f}  critic loss {loss.item():.4f}")
    print(f"ms_per_step: {1000 * (time.perf_counter() - start) / max(1, args.steps - 10):.2f}")


if __name__ == "__main__":
    main()
