// What the figures share: the frame around a chart, and the axis of layers.
#pragma once

#include <string>

#include "oscar/report/chart.h"

namespace oscar {

// `title` and `caption` are plain text, `svg` is markup.
std::string figure_html(const std::string& title, const std::string& svg,
                        const std::string& caption);

// Layers 0 .. layers - 1 with ticks at round numbers.
AxisSpec layer_axis(size_t layers);

}  // namespace oscar
