"""Whether vLLM would serve a model over a bundle, before it starts: one line, and 1 where it would not.

    python -m oscar_int2 check MODEL BUNDLE [OPTIONS OF vllm serve]

It makes the configuration that `vllm serve MODEL OPTIONS` would make with VLLM_OSCAR_BUNDLE=BUNDLE, in which the
plugin refuses what it does not serve. It compares the model's files with the bundle, by their fingerprint and by the
bundle's samples of q, k, v and o. No weights are loaded: the server compares them when it has them, and a self-check
(VLLM_OSCAR_SELF_CHECK=1) runs them.
"""
import argparse
import os
import sys

from ..errors import OscarError, UnsupportedError


def parser():
    parser = argparse.ArgumentParser(
        prog="python -m oscar_int2 check", description="Whether vLLM would serve MODEL over BUNDLE, without loading weights.",
        epilog="further options are those of vllm serve")
    parser.add_argument("model", metavar="MODEL", help="what vllm serve is given")
    parser.add_argument("bundle", metavar="BUNDLE", help="what VLLM_OSCAR_BUNDLE would name")
    return parser


def engine_config(model, options):
    """(vLLM's configuration, options that are none of it), of the options of vllm serve but --config: those of the
    server, such as --port, change nothing here. Raises what making it raises."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if any(option.split("=")[0] == "--config" for option in options):
        raise UnsupportedError("--config is not read here; give the options that it holds")
    known = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="python -m oscar_int2 check"))
    arguments, others = known.parse_known_args(["--model", model, *options])
    return EngineArgs.from_cli_args(arguments).create_engine_config(), others


def refuse_bf16():
    """Raises UnsupportedError where this environment keeps vLLM from loading the plugin."""
    from vllm import envs
    if envs.VLLM_PLUGINS is not None and "oscar_int2" not in envs.VLLM_PLUGINS:
        raise UnsupportedError(f"VLLM_PLUGINS is {','.join(envs.VLLM_PLUGINS)!r}, so that vLLM does not load the plugin "
                               "oscar_int2, and its cache would be BF16; name it there too, or unset the variable")


def compared(config, files):
    """What is known of the weights, `files` of their files, before they are loaded."""
    if config.load_config.load_format == "dummy":
        return "its weights would be random ones"
    if config.model_config.quantization is not None:
        return f"{files}; weights in {config.model_config.quantization} are compared by their files alone"
    return files


def main(words):
    arguments, options = parser().parse_known_args(words)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as error:
        print(f"error: vLLM is not here ({error}); the wheel brings it with its extra vllm (docs/vllm.md)", file=sys.stderr)
        return 1
    from .. import weights
    from ..vllm import layers, register, settings

    os.environ[settings.BUNDLE] = arguments.bundle
    try:
        refuse_bf16()
        register()
        config, others = engine_config(arguments.model, options)
        bundle = settings.bundle(config)
        if config.load_config.load_format == "dummy" and settings.weights_of(config) != weights.ANY:
            raise UnsupportedError("--load-format dummy makes random weights, which are not those of the bundle")
        files = weights.compare_files(bundle, config.model_config.model, config.model_config.revision,
                                      settings.weights_of(config), f"{settings.WEIGHTS}=any",
                                      config.model_config.quantization is not None)
    except (OscarError, OSError, ValueError) as error:
        print(f"error: vLLM {vllm.__version__} would not serve {arguments.model} over {arguments.bundle}: {error}",
              file=sys.stderr)
        return 1
    beyond = bundle.beyond_positions(config.model_config.max_model_len)
    held = sum(map(layers.is_int2, bundle.layers.values()))
    print(f"vLLM {vllm.__version__} would serve {arguments.model} over {arguments.bundle}: {held} of "
          f"{config.model_config.get_total_num_hidden_layers()} layers in 2 bits, {config.scheduler_config.max_num_seqs} "
          f"requests at a time of up to {config.model_config.max_model_len} tokens; {compared(config, files)}"
          + (f". {beyond}" if beyond else "")
          + (f". Not looked at: {' '.join(others)}" if others else ""))
    return 0
