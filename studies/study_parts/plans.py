"""The models that have a study."""
from . import real_models, tiny_gqa

PLANS = {plan.name: plan for plan in (tiny_gqa.PLAN, real_models.SMOLLM2, real_models.QWEN_CODER)}
