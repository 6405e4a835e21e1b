"""The models that have a study."""
from . import smollm2, tiny_gqa

PLANS = {plan.name: plan for plan in (tiny_gqa.PLAN, smollm2.PLAN)}
