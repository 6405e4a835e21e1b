// Names and numbers as JSON.
#include "oscar/search/search_record.h"

#include <fmt/format.h>

#include <cmath>
#include <string_view>

#include "oscar/fit/presets.h"

namespace oscar {
namespace {

std::string label(const char* stage, const HeadChoice& head, Side side,
                  const std::vector<FitVariant>& fits) {
  if (std::string_view(stage) == "transform") return fit_text(fit_of(head, side, fits));
  return std::string_view(stage) == "writer" ? writer_text(head)
                                             : clip_text(head.recipe.clip_ratio);
}

}  // namespace

std::string writer_text(const HeadChoice& head) {
  return fmt::format("{} {}", scale_correction_name(head.recipe.scale_correction),
                     rounding_name(head.recipe.rounding));
}

std::string fit_text(const FitVariant& fit) {
  return fmt::format("{}{} {} {}", method_name(fit.kind), fit.own_basis ? " in own basis" : "",
                     fit.center ? "centred" : "uncentred", granularity_name(fit.granularity));
}

const FitVariant& fit_of(const HeadChoice& head, Side side, const std::vector<FitVariant>& fits) {
  for (const FitVariant& fit : fits) {
    if (&fit.side(side) == head.fit) return fit;
  }
  return fits.front();
}

double shortened(double value) {
  return std::isfinite(value) ? std::stod(fmt::format("{:.4g}", value)) : 0.0;
}

double per_energy(double loss, double energy) { return energy > 0 ? loss / energy : 0.0; }

ClipLosses clip_losses(const std::vector<SideVariant>& variants, const LossTable& table,
                       int first) {
  const auto count = static_cast<int>(variants.size());
  ClipLosses losses{.ratio = {}, .nmse = {count, static_cast<int>(table.heads)}};
  for (int i = 0; i < count; ++i) {
    losses.ratio.push_back(variants[static_cast<size_t>(i)].front().recipe.clip_ratio);
    for (int head = 0; head < losses.nmse.cols; ++head) {
      losses.nmse[i](head) =
          per_energy(table.total(first + i, head), table.energy[static_cast<size_t>(head)]);
    }
  }
  return losses;
}

void note_stage(SideState& state, const char* stage, const Candidate& candidate,
                const std::vector<SideVariant>& variants, const LossTable& table, int first) {
  Json names = Json::array(), losses = Json::array();
  for (size_t i = 0; i < variants.size(); ++i) {
    names.push_back(i == 0 ? "before" : label(stage, variants[i][0], state.side, candidate.fits));
    Json by_head = Json::array();
    for (int64_t head = 0; head < table.heads; ++head) {
      by_head.push_back(shortened(per_energy(table.total(first + static_cast<int64_t>(i), head),
                                             table.energy[static_cast<size_t>(head)])));
    }
    losses.push_back(std::move(by_head));
  }
  state.compared.push_back({{"stage", stage}, {"variants", names}, {"nmse", losses}});
}

}  // namespace oscar
