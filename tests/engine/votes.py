"""Random votes of replicas that share experts."""

import random

from headrace.core.types.ranks.coordinate import Rules, Vote, vote

RULES = (Rules(), Rules(multiple=4, pad="max"), Rules(multiple=2, cut=True, cut_prefill=16, cut_decode=4))


def random_votes(size: int, rules: Rules, generator: random.Random) -> list[Vote]:
    """Replicas that are idle, decode or compute prompts; some could run with prepared graphs."""
    votes = []
    for _ in range(size):
        longest = generator.choice([1, 40])
        counts = [generator.randint(1, longest) for _ in range(generator.choice([0, 1, 3, 20]))]
        votes.append(vote(counts, rules)._replace(mode=generator.randint(0, 1)))
    return votes


def rounds(size: int, of_each: int) -> list[tuple[list[Vote], Rules]]:
    """So many votes by each of the rules; the same for a size, in every process."""
    generator = random.Random(size)
    return [(random_votes(size, rules, generator), rules) for rules in RULES for _ in range(of_each)]
