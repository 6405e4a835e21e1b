// --for STACK: choices limited to what one serving stack runs.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "common/options.h"
#include "oscar/stacks/restrict.h"

namespace oscar::app {

// `stack` stays empty when the option is not given.
void add_stack_option(CLI::App& program, std::string& stack);

// What the options of `program` (add_fit_options, add_quantizer_options) say, limited to `stack`.
// Throws CLI::ValidationError (a usage error), naming the option, for a stack that is not served
// yet, for an option that asks for what the stack does not serve, and for a search of which nothing
// is left.
StackChoice choose_for_stack(const CLI::App& program, const std::string& stack,
                             const FitArguments& fit, const QuantizerSettings& quantizer);

}  // namespace oscar::app
