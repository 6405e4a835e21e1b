// The supported families, and what several of them read alike.
#pragma once

#include <string>
#include <vector>

#include "oscar/checkpoint/model_config.h"
#include "oscar/checkpoint/model_family.h"

namespace oscar {

extern const ModelFamily kQwen3, kQwen2, kQwen3Moe, kLlama, kMistral, kGlm4Moe, kGemma3;

// `config`'s layers, all with this attention and a dense MLP of intermediate_size.
std::vector<LayerSpec> dense_layers(const ConfigReader& reader, const ModelConfig& config,
                                    const AttentionSpec& attention, int default_intermediate_size,
                                    bool mlp_bias = false);

// A number up to kMaxExperts under either of two names: transformers 5 writes some keys anew.
int read_one_of(const ConfigReader& reader, const std::string& key, const std::string& other,
                int fallback);

// Throws Error where more experts are chosen than may be.
void require_enough_experts(const ConfigReader& reader, const ExpertsSpec& experts);

// sliding_window: `fallback` where the key is absent, 0 where it is null.
int read_window(const ConfigReader& reader, int fallback);

// The kind of every layer from layer_types; empty where the key is absent.
std::vector<AttentionKind> read_layer_types(const ConfigReader& reader, int num_layers);

// Throws Error where layer_types says other than that all layers are of this kind.
void require_one_layer_type(const ConfigReader& reader, int num_layers, AttentionKind kind);

}  // namespace oscar
